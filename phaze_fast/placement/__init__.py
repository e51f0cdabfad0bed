"""Takes layers with their times and bytes, gives stages, devices and replicas on a cluster.

Empty so far: placement comes after schedules.
"""
