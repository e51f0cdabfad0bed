"""Takes results, gives tables, plots, traces and configurations.

Empty so far: reports come with the search; the CLI prints its own tables until then.
"""
