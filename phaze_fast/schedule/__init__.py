"""Optimal schedules of a layer's operators on one chip, with their proofs."""

from phaze_fast.schedule.cache import LayerStore as LayerStore
from phaze_fast.schedule.cache import ScheduleCache as ScheduleCache
from phaze_fast.schedule.cache import ScheduleCacheInfo as ScheduleCacheInfo
from phaze_fast.schedule.instance import LayerInstance as LayerInstance
from phaze_fast.schedule.instance import LayerSchedule as LayerSchedule
from phaze_fast.schedule.instance import instance_from_dict as instance_from_dict
from phaze_fast.schedule.instance import read_instances as read_instances
from phaze_fast.schedule.instance import topological_order as topological_order
from phaze_fast.schedule.layers import RULES as RULES
from phaze_fast.schedule.layers import LayerTimes as LayerTimes
from phaze_fast.schedule.layers import schedule_instances as schedule_instances
from phaze_fast.schedule.layers import schedule_layers as schedule_layers
