#!/usr/bin/env bash
# Decision and fit: ours and the same with NumPy and SciPy, on the same records, in one run.
# Needs Python 3.11 or later; keeps its virtual environment and data in .cache/.
set -euo pipefail
cd "$(dirname "$0")/../../.."
cache=.cache/bench-locality
mkdir -p "$cache"
[ -x "$cache/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$cache/venv"
"$cache/venv/bin/python" -c 'import numpy, scipy' 2>/dev/null ||
  "$cache/venv/bin/pip" install --quiet 'numpy>=2' 'scipy>=1.15'
[ -f "$cache/data.bin" ] || "$cache/venv/bin/python" tools/bench/locality/make_data.py "$cache/data.bin"
echo "== ours (criterion: low, estimate, high)"
LOCALITY_BENCH_DATA="$PWD/$cache/data.bin" cargo bench --quiet -p locality --bench locality -- --noplot 2>&1 |
  grep -E 'time:|p50|processor'
echo "== NumPy and SciPy"
# One thread for a decision, as ours; the fit takes what cores there are, as ours.
OPENBLAS_NUM_THREADS=1 "$cache/venv/bin/python" tools/bench/locality/baseline.py "$cache/data.bin" decision
"$cache/venv/bin/python" tools/bench/locality/baseline.py "$cache/data.bin" fit
