"""A TaskProlog for Slurm: tells each task which devices of a generic resource (gres) its job has on its node.

Slurm sets no variable for a resource of the site's own; only `scontrol -d show job` knows the numbers, and only where gres.conf
names the devices' files (File=).
"""

from __future__ import annotations

import re

from ..errors import UserError

# slurmstepd reads `export NAME=VALUE` from what a TaskProlog prints, and one that fails ends the task: so it never fails.
_SCRIPT = """\
#!/bin/bash
# TaskProlog of Tilework's: which devices of gres {gres} the job has on this node.
[ -n "$SLURM_JOB_ID" ] && [ -n "$SLURMD_NODENAME" ] || exit 0
tell() {{
    timeout 10 scontrol "$@" 2>/dev/null
}}
tell -d -o show job "$SLURM_JOB_ID" | grep -o ' Nodes=[^ ]* [^=]*=[^ ]* Mem=[^ ]* GRES=[^ ]*' | while read -r nodes _ _ gres; do
    tell show hostnames "${{nodes#Nodes=}}" | grep -qxF -- "$SLURMD_NODENAME" || continue
    # GRES=one:2(IDX:0,3),two:type:1(IDX:5)
    devices=$(printf '%s\\n' "${{gres#GRES=}}" | grep -oE '(^|,){gres}(:[^(,]*)?\\(IDX:[0-9,-]+\\)' | sed 's/.*IDX://; s/)//')
    devices=${{devices//$'\\n'/,}}  # of several types
    [ -n "$devices" ] || continue
{tiles}
    echo "export TILEWORK_GRES_DEVICES=$devices"
    break
done
exit 0
"""


_THOSE = """    echo "export TILEWORK_TILES=job:chip:$devices\""""
# What Slurm gave the node is meant for each task: as many chips as the tasks of this node need together, at most all of them.
_FOR_EACH = """    each=$(grep -oE '(^|,){gres}(:[^(,]*)?\\(IDX' <<< "${{gres#GRES=}}" | grep -oE '[0-9]+\\(' | head -n 1)
    each=${{each%(}}
    tasks=${{SLURM_STEP_TASKS_PER_NODE:-${{SLURM_TASKS_PER_NODE:-1}}}}
    echo "export TILEWORK_TILES=job:chips:$(( ${{each:-1}} * ${{tasks%%[!0-9]*}} ))\""""


def script(gres: str, *, per_task: bool = False) -> str:
    """The text of the script, for a gres of that name. per_task: its numbers are meant for each task."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", gres):
        raise UserError("job-gres", f"{gres!r} is no name of a gres", expected="a name of GresTypes in slurm.conf")
    return _SCRIPT.format(gres=gres, tiles=_FOR_EACH.format(gres=gres) if per_task else _THOSE)
