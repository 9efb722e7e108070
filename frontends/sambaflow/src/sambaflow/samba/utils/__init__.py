"""samba.utils: everything that apps reach as utils.NAME."""

from __future__ import annotations

from ..distributed import get_rank as get_rank
from ..distributed import get_world_size as get_world_size
from ..distributed import is_main_process as is_main_process
from .common import common_app_driver as common_app_driver
from .measuring import measure_performance as measure_performance
from .measuring import measure_sections as measure_sections
from .utils import SNType as SNType
from .utils import assert_close as assert_close
from .utils import compile as compile
from .utils import create_mac_resource_report as create_mac_resource_report
from .utils import fix_rdu_affinity as fix_rdu_affinity
from .utils import get_file_dir as get_file_dir
from .utils import init_output_grads as init_output_grads
from .utils import parse_dtype as parse_dtype
from .utils import set_seed as set_seed
from .utils import trace_graph as trace_graph
from .utils import trace_multigraph as trace_multigraph
from .utils import weight_norm_ as weight_norm_
