#!/usr/bin/env bash
# The whole move, in a clean tree: definitions that knot the imports, the merge, names in texts, the tests.
set -euo pipefail
here=tools/house
mkdir -p build/house
python3 $here/prepare.py
python3 $here/layout.py > build/house/map.json
.venv/bin/python $here/merge.py build/house/map.json
python3 $here/texts.py
python3 $here/after.py
python3 $here/pages.py
.venv/bin/ruff check --fix -q . || true
.venv/bin/ruff format -q .
.venv/bin/python $here/wrap.py
python3 $here/tests_layout.py > build/house/tests_map.json
.venv/bin/python $here/merge.py build/house/tests_map.json
python3 $here/tests_after.py
.venv/bin/ruff check --fix -q . || true
.venv/bin/ruff format -q .
.venv/bin/python $here/wrap.py
python3 $here/circles.py
