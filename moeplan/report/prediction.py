"""What ``moeplan predict`` prints."""

from collections.abc import Sequence

from moeplan.cp_schedule import tokens_by_size
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.sizing import mfu_frac, peak_of
from moeplan.report.output import out_console
from moeplan.report.tables import memory_table, table, time_table
from moeplan.results import Figures
from moeplan.simulator.memory import MemoryItem
from moeplan.step_packs import step_schedule
from moeplan.units import TFLOP, format_bytes, format_seconds
from moeplan.vocabulary import PRECISIONS, PrecisionName


def print_prediction(plan: Plan, profile: HardwareProfile, predicted: Figures) -> None:
    """Headline figures, the memory wall by rank, time by op family, doubts."""
    print_headline(plan, profile, predicted)
    console = out_console()
    console.print(memory_table(predicted))
    console.print(time_table(predicted))
    for note in predicted.notes:
        console.print(f"note: {note}")


def print_headline(plan: Plan, profile: HardwareProfile, predicted: Figures) -> None:
    """What is predicted of which plan, and whether it fits."""
    console = out_console()
    machine = f"{plan.num_gpus} x {profile.name}, stack {predicted.stack}"
    console.print(f"plan {plan.plan_id}: {plan.model.name} on {machine}")
    console.print(f"layout {plan.layout}, {_batches(plan)}")
    console.print(
        f"step {format_seconds(predicted.step_s)} +- {100 * predicted.error_bar_frac:.0f} %, "
        f"{predicted.tokens_per_s_per_gpu:.0f} tokens/s/GPU, {predicted.model_tflops_per_gpu:.4g} model TFLOP/s/GPU"
    )
    console.print(mfu_text(predicted, plan.precision, profile))
    usable = profile.memory_bytes.value
    verdict = "fits" if predicted.peak_memory_bytes <= usable else "DOES NOT FIT"
    console.print(
        f"memory {format_bytes(predicted.peak_memory_bytes)} of {format_bytes(usable)} on pipeline rank "
        f"{predicted.peak_rank}: {verdict}"
    )
    for refusal in predicted.refusals:
        console.print(f"WOULD NOT RUN: {refusal}")


def _batches(plan: Plan) -> str:
    """What a data-parallel rank runs in a step; under dynamic_cp, all of them together."""
    if plan.dynamic_cp:
        batches = step_schedule(plan, plan.document_lengths)
        sizes = ", ".join(map(str, tokens_by_size(batches)))
        return f"{len(plan.document_lengths)} documents in {len(batches)} micro-batches, cp {sizes}"
    packed = f", each of {len(plan.packed_lengths)} documents" if plan.packed_lengths else ""
    return f"{plan.num_micro_batches} micro-batches of {plan.mbs} x {plan.seq_len}{packed}"


def mfu_text(predicted: Figures, precision: PrecisionName, profile: HardwareProfile) -> str:
    """Model FLOP utilization with its denominator and where that comes from."""
    dtype = PRECISIONS[precision].gemm_dtype
    frac, peak = mfu_frac(predicted, precision, profile), peak_of(precision, profile)
    if frac is None or peak is None:
        return f"MFU unknown: {profile.name} has no peak of {dtype}"
    source = f"{peak.source}: {peak.ref}"
    return f"MFU {100 * frac:.1f} % of the dense {dtype} peak, {peak.value / TFLOP:.4g} TFLOP/s ({source})"


def print_memory_items(items: Sequence[MemoryItem], rank: int | None) -> None:
    """Every component and kept tensor of one pipeline rank at its peak; framework left out."""
    rows = [[item.category, item.component, item.name, format_bytes(item.size_bytes)] for item in items]
    columns = ["category", "component", "tensor", "at the peak"]
    out_console().print(table(f"Memory of pipeline rank {rank}, tensor by tensor", columns, rows, left=3))
