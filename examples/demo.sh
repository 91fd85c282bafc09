#!/usr/bin/env bash
# What moeplan does, end to end, on this machine. Usage: examples/demo.sh [OUTPUT_FOLDER]
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-build/demo}
mkdir -p "$out"
cd "$out"

# Prints a step's title and its command, then runs it.
step() {
  printf '\n## %s\n$ %s\n\n' "$1" "${*:2}"
  "${@:2}"
}

step "1. Which plan trains DeepSeek-V3 fastest on 256 GB300? (read from its Hugging Face config.json)" \
  moeplan search --model "$here/moeplan/models/hf/deepseek-v3-config.json" --hardware gb300 --gpus 256 \
  --seq-len 4096 --global-batch-size 8192 --out deepseek-v3.toml

# A machine that was busier while it was calibrated than while it trained, or the other way round, is measured once more.
for attempt in first second; do
  step "2. What is this machine like, with 4 processes at work?" \
    moeplan calibrate --processes 4 --out cpu-host.toml

  step "3. Which plan trains a tiny MoE fastest on it, with its 8 experts spread over the 4 processes?" \
    moeplan search --model tiny-moe --hardware ./cpu-host.toml --gpus 4 --seq-len 256 --global-batch-size 16 \
    --fix ep=4 --top 5 --out tiny-moe.toml

  status=0
  step "4. Train it for real, and hold the prediction to the measurement: 50 % of step time, 20 % of memory" \
    moeplan run tiny-moe.toml --steps 30 --out measurement.json --max-step-error 0.5 --max-memory-error 0.2 || status=$?
  [ "$status" -ne 0 ] || break
  if [ "$status" -ne 4 ] || [ "$attempt" = second ]; then exit "$status"; fi # 4: outside a tolerance
  printf '\nOutside the tolerance: calibrating and training once more, in case the machine was busy during one of them.\n'
done

printf '\nPlans, the profile of this machine and the measurement are in %s\n' "$out"
