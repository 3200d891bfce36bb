#!/bin/bash
# Makes VERSION.sql and VERSION.show.json with the autotune of a checkout: make.sh CHECKOUT VERSION
# The search is killed in its third trial and continued, so that one attempt is lost.
set -eu
golden=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
cd "$folder"
cp "$golden/text.jsonl" "$golden/space.toml" .
export PYTHONPATH=$1
version=$2
storage=sqlite:///autotune.db
options="--name golden --storage $storage --space space.toml --dataset text.jsonl --device cpu
  --layers 2 --width 32 --heads 2 --seq-len 32 --global-batch 4 --steps 8 --warmup-steps 2
  --eval-sequences 4 --learning-rate sgd=1e30 --max-mem 4GiB --trials 4 --time-budget 60s"

python -m autotune search $options > first.txt 2>&1 &
search=$!
until grep -q '#2 ' first.txt; do sleep 0.2; done
kill -KILL $search
wait $search || true
sleep 2
python -m autotune search $options --confirm-share 0.5 > second.txt 2>&1
python -m autotune show golden --storage $storage --json > "$golden/$version.show.json"
python - "$golden/$version.sql" <<'PYTHON'
import sqlite3, sys

connection = sqlite3.connect("autotune.db")
with open(sys.argv[1], "w", encoding="utf-8") as dump:
    for statement in connection.iterdump():
        dump.write(statement + "\n")
PYTHON
