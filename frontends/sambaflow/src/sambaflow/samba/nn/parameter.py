from torch.nn.parameter import *  # noqa: F403

from ..sambatensor import SambaParameter as SambaParameter
