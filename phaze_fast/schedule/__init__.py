"""Optimal schedules of a layer's operators on one chip, with their proofs."""

from phaze_fast.schedule.cache import LayerStore, ScheduleCache, ScheduleCacheInfo
from phaze_fast.schedule.instance import LayerInstance, instance_from_dict, read_instances
from phaze_fast.schedule.layers import LayerTimes, schedule_layers
from phaze_fast.schedule.result import LayerSchedule
from phaze_fast.schedule.solve import RULES, schedule_instances

__all__ = [
    "RULES",
    "LayerInstance",
    "LayerSchedule",
    "LayerStore",
    "LayerTimes",
    "ScheduleCache",
    "ScheduleCacheInfo",
    "instance_from_dict",
    "read_instances",
    "schedule_instances",
    "schedule_layers",
]
