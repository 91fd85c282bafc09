"""What several commands read: plans, profiles, stacks."""

from pathlib import Path

from moeplan.files import read_toml, validate
from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.simulator.stack import SoftwareStack, load_stack

DEFAULT_STACKS = {"cpu": "native", "cuda": "megatron-bridge-26.08"}


def load_plan(path: Path) -> Plan:
    """The plan of a TOML file, checked."""
    return validate(Plan, read_toml(path), str(path))


def load_stack_for(profile: HardwareProfile, name: str) -> SoftwareStack:
    """The named stack, or by default the one that people run on that kind of device."""
    return load_stack(name or DEFAULT_STACKS[profile.device]).on(profile.device)


def load_machine(plan: Plan, hardware: str) -> tuple[HardwareProfile, SoftwareStack]:
    """Profile (``hardware`` if given, else the plan's) and stack of a plan."""
    profile = load_profile(hardware or plan.hardware)
    return profile, load_stack(plan.stack).on(profile.device)
