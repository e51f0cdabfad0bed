"""Chips that stay good where constants are uncertain: intervals, regret, value of information."""

from phaze_fast.robust.area_range import AreaRange as AreaRange
from phaze_fast.robust.area_range import terms_mm2 as terms_mm2
from phaze_fast.robust.area_range import widened_space as widened_space
from phaze_fast.robust.constants import AREA_TERMS as AREA_TERMS
from phaze_fast.robust.constants import Constant as Constant
from phaze_fast.robust.constants import Uncertainty as Uncertainty
from phaze_fast.robust.constants import default_uncertainty as default_uncertainty
from phaze_fast.robust.information import Information as Information
from phaze_fast.robust.information import information as information
from phaze_fast.robust.regret import TOLERANCE as TOLERANCE
from phaze_fast.robust.regret import LargestRegret as LargestRegret
from phaze_fast.robust.regret import RobustResult as RobustResult
from phaze_fast.robust.regret import robust_chip as robust_chip
from phaze_fast.robust.scenarios import UncertainSearch as UncertainSearch
