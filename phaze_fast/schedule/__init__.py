"""Optimal schedules of a layer's operators on one chip, with their proofs."""

from phaze_fast.schedule.cache import LayerStore, ScheduleCache, ScheduleCacheInfo
from phaze_fast.schedule.instance import (
    LayerInstance,
    LayerSchedule,
    instance_from_dict,
    read_instances,
    topological_order,
)
from phaze_fast.schedule.layers import (
    RULES,
    LayerTimes,
    layer_makespans,
    schedule_instances,
    schedule_layers,
)

__all__ = [
    "RULES",
    "LayerInstance",
    "LayerSchedule",
    "LayerStore",
    "LayerTimes",
    "ScheduleCache",
    "ScheduleCacheInfo",
    "instance_from_dict",
    "layer_makespans",
    "read_instances",
    "schedule_instances",
    "schedule_layers",
    "topological_order",
]
