"""Memory of a device by term, for single stages and grids of plans."""

from phaze_fast.memory.footprint import INSTANTS as INSTANTS
from phaze_fast.memory.footprint import SCHEDULE_ALIASES as SCHEDULE_ALIASES
from phaze_fast.memory.footprint import SCHEDULE_CODES as SCHEDULE_CODES
from phaze_fast.memory.footprint import SCHEDULES as SCHEDULES
from phaze_fast.memory.footprint import STAGE_DTYPE as STAGE_DTYPE
from phaze_fast.memory.footprint import TERMS as TERMS
from phaze_fast.memory.footprint import TERMS_DTYPE as TERMS_DTYPE
from phaze_fast.memory.footprint import TWO_CHUNKS as TWO_CHUNKS
from phaze_fast.memory.footprint import Footprint as Footprint
from phaze_fast.memory.footprint import Pipeline as Pipeline
from phaze_fast.memory.footprint import ScheduleName as ScheduleName
from phaze_fast.memory.footprint import check_chunks as check_chunks
from phaze_fast.memory.footprint import copied_state_bytes as copied_state_bytes
from phaze_fast.memory.footprint import exchange_bytes as exchange_bytes
from phaze_fast.memory.footprint import footprint as footprint
from phaze_fast.memory.footprint import footprint_batch as footprint_batch
from phaze_fast.memory.footprint import layer_state_bytes as layer_state_bytes
from phaze_fast.memory.footprint import places as places
from phaze_fast.memory.footprint import stage_row as stage_row
from phaze_fast.memory.footprint import stage_rows as stage_rows
from phaze_fast.memory.optimizer import OPTIMIZERS as OPTIMIZERS
from phaze_fast.memory.optimizer import OTHER_KERNELS as OTHER_KERNELS
from phaze_fast.memory.optimizer import Optimizer as Optimizer
from phaze_fast.memory.optimizer import optimizer as optimizer
