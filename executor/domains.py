"""Which ranks of a group share a host, as the launcher tells."""

import os


def ranks_per_domain(ranks: tuple[int, ...]) -> int:
    """Ranks of the group on one host, where every host has as many side by side in it; else all of them.

    torchrun numbers the ranks of a host one after another and says how many there are in LOCAL_WORLD_SIZE. Without it
    the group counts as one host, as it does where its hosts are unequal.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local == 0:
        return len(ranks)
    hosts = [rank // local for rank in ranks]
    inside = hosts.count(hosts[0])
    is_even = len(ranks) % inside == 0 and all(
        len(set(hosts[start : start + inside])) == 1 for start in range(0, len(ranks), inside)
    )
    return inside if is_even else len(ranks)
