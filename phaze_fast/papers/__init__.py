"""Other systems reimplemented: PHAZE placement, NEST, hand plans, early stop, back-test."""

from phaze_fast.papers.nest import PRICED_REPLICAS as PRICED_REPLICAS
from phaze_fast.papers.nest import TIME_UNITS as TIME_UNITS
from phaze_fast.papers.nest import NestProblem as NestProblem
from phaze_fast.papers.nest import is_nest as is_nest
from phaze_fast.papers.nest import nest_from_dict as nest_from_dict
from phaze_fast.papers.nest import solve_nest as solve_nest
from phaze_fast.papers.placement import LayerTable as LayerTable
from phaze_fast.papers.placement import PlacedStage as PlacedStage
from phaze_fast.papers.placement import Placement as Placement
from phaze_fast.papers.placement import PublishedProblem as PublishedProblem
from phaze_fast.papers.placement import place as place
from phaze_fast.papers.placement import place_batch as place_batch
from phaze_fast.papers.problem_files import ProblemRecord as ProblemRecord
from phaze_fast.papers.problem_files import read_records as read_records
from phaze_fast.papers.published import problem_from_dict as problem_from_dict
from phaze_fast.papers.published import solve_published as solve_published
