#!/bin/bash
# ./Gpt1.5B_single.sh [RunID] [--size tiny|small]: compiles and trains one instance.
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
echo "Using $OUTPUT for output"
{ compile gpt15_single && train gpt15_single; } 2>&1 | tee -a "$OUTPUT"
