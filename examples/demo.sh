#!/usr/bin/env bash
# What moeplan does, end to end, on this machine. Usage: examples/demo.sh [OUTPUT_FOLDER]
set -euo pipefail

out=${1:-build/demo}
mkdir -p "$out"

# Prints a step's title and its command, then runs it.
step() {
  printf '\n## %s\n$ %s\n' "$1" "${*:2}"
  "${@:2}"
}

step "Which plan trains DeepSeek-V3 fastest on 256 GB300?" \
  moeplan search --model deepseek-v3 --hardware gb300 --gpus 256 --seq-len 4096 --global-batch-size 8192 \
  --out "$out/plan.toml"

step "Where do its memory and its step time go?" \
  moeplan predict "$out/plan.toml" --trace "$out/trace.json" --html "$out/report.html"

printf '\nFiles are in %s\n' "$out"
