"""What ``moeplan search`` prints of several clusters, and of the training run that one is to do."""

from collections.abc import Sequence

from moeplan.planner.search import short_form
from moeplan.planner.sizing import Bill, Cluster, Job, mfu_frac
from moeplan.report.output import out_console
from moeplan.report.tables import table
from moeplan.units import DAY_S, format_count, format_seconds


def print_clusters(clusters: Sequence[Cluster], job: Job | None) -> None:
    """One line a cluster, in the order given: its fastest plan, what the job takes there, and what is wrong with it."""
    console = out_console()
    columns = ["#", "hardware", "GPUs", "front", "step", "tok/s/GPU", "MFU", "+-", "tokens/day"]
    columns += ["days", "GPU-hours", "cost", "energy"] if job is not None else []
    rows = [
        [str(index), *_plan_cells(one), *(_bill_cells(one.bill) if job is not None else [])]
        for index, one in enumerate(clusters, start=1)
    ]
    console.print(table("Clusters, the best first", columns, rows, left=2))
    for index, one in enumerate(clusters, start=1):
        console.print(f"{index}: {_remark(one)}")
    console.print(
        "front: nothing else here is both as fast and as cheap; MFU: of the dense peak of the plan's precision"
    )
    if job is not None:
        for cluster in {one.hardware: one for one in clusters if one.bill is not None}.values():
            print_price(cluster.hardware, cluster.bill)
        console.print(what_counts(job))


def print_bill(hardware: str, bill: Bill, job: Job, error_bar_frac: float, problem: str) -> None:
    """What the job takes with the best plan of one cluster."""
    console = out_console()
    cost = "" if bill.cost_usd is None else f", {format_count(bill.cost_usd)} USD"
    energy = "" if bill.energy_kwh is None else f", {_energy(bill)} of GPU power"
    console.print(
        f"{format_count(job.tokens)} tokens: {bill.train_s / DAY_S:.3g} days +- {100 * error_bar_frac:.0f} %, "
        f"{format_count(bill.gpu_hours)} GPU-hours{cost}{energy}"
    )
    print_price(hardware, bill)
    console.print(what_counts(job))
    if problem:
        console.print(f"outside the limits: {problem}")


def print_price(hardware: str, bill: Bill | None) -> None:
    """Where a price comes from."""
    price = bill.price if bill is not None else None
    if price is None:
        out_console().print(f"price of {hardware}: not known, give --price")
        return
    between = "" if price.low is None or price.high is None else f", {price.low:g} to {price.high:g} elsewhere"
    out_console().print(f"price of {hardware}: {price.value:g} USD/GPU-hour ({price.source}: {price.ref}{between})")


def what_counts(job: Job) -> str:
    """What days and energy leave out."""
    lost = "no time lost to failures" if job.goodput_frac == 1 else f"{100 * job.goodput_frac:g} % of the time in steps"
    return f"days: {lost} (--goodput); energy: each GPU at its power limit, without hosts, network and cooling"


def _plan_cells(cluster: Cluster) -> list[str]:
    cells = [cluster.hardware, str(cluster.num_gpus), "*" if cluster.is_on_front else ""]
    if cluster.outcome is None or not cluster.outcome.plans:
        return [*cells, *["-"] * 5]
    best = cluster.outcome.plans[0]
    predicted, mfu = best.predicted, mfu_frac(best.predicted, best.plan.precision, cluster.profile)
    return [
        *cells,
        format_seconds(predicted.step_s),
        f"{predicted.tokens_per_s_per_gpu:.0f}",
        "-" if mfu is None else f"{100 * mfu:.0f} %",
        f"{100 * predicted.error_bar_frac:.0f} %",
        format_count(predicted.tokens_per_s_per_gpu * cluster.num_gpus * DAY_S),
    ]


def _bill_cells(bill: Bill | None) -> list[str]:
    if bill is None:
        return ["-"] * 4
    cost = "-" if bill.cost_usd is None else f"{format_count(bill.cost_usd)} USD"
    return [f"{bill.train_s / DAY_S:.3g}", format_count(bill.gpu_hours), cost, _energy(bill)]


def _energy(bill: Bill) -> str:
    if bill.energy_kwh is None:
        return "-"
    paid = "" if bill.energy_usd is None else f" ({format_count(bill.energy_usd)} USD)"
    return f"{bill.energy_kwh / 1000:,.1f} MWh{paid}"


def _remark(cluster: Cluster) -> str:
    if cluster.outcome is None or not cluster.outcome.plans:
        return cluster.problem
    plan = cluster.outcome.plans[0].plan
    limits = f"outside the limits, {cluster.problem}; " if cluster.problem else ""
    return f"{limits}plan {plan.plan_id}: {short_form(plan.point)}"
