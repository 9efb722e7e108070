"""samba.nn: old apps use it in the place of torch.nn."""

from torch.nn import *  # noqa: F403
from torch.nn import functional as functional
from torch.nn import init as init
from torch.nn import utils as utils

from ..sambatensor import SambaParameter as SambaParameter
from . import parameter as parameter  # type: ignore[no-redef]
