"""Step errors: turn the codes of the compiled steps into errors that say what was asked, what there is, what to do."""

from __future__ import annotations

from typing import NoReturn

from pagedkv.core import state as st
from pagedkv.core.handles import Plan
from pagedkv.core.pool.frames import pending
from pagedkv.core.pool.quotas import givable
from pagedkv.core.state import I32, I64, State
from pagedkv.core.tables import steps
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict, QuotaExceeded, StaleHandle


def refuse_plan(s: State, failure: tuple[int, int], asids: I32, counts: I64, accounts: dict[bytes, int]) -> NoReturn:
    """Raise the error of a step that could not be planned. failure: (code, where) of plan_step."""
    code, where = failure
    if code == steps.OVER_QUOTA:
        figures = st.account_registers(s.reg)[where]
        tenant = next(tenant for tenant, account in accounts.items() if account == where)
        raise QuotaExceeded(
            tenant, int(figures[st.NEED]), int(figures[st.HARD]), int(figures[st.USED]), int(figures[st.EVICTABLE])
        )
    if code == steps.PROTECTED_SHARES:
        raise OutOfFrames(where, int(s.reg[st.NUM_FREE]), int(givable(s)), pending(s))
    if code == steps.SHORT:
        raise OutOfFrames(where, int(s.reg[st.NUM_FREE]), int(s.reg[st.NUM_EVICTABLE]), pending(s))
    if code == steps.NEGATIVE:
        raise InvalidRequest(f"plan asks for {counts[where]} tokens of address space {asids[where]}; give 0 or more")
    if code == steps.TOO_LONG:
        raise InvalidRequest(
            f"plan asks for {counts[where]} tokens of address space {asids[where]}, but a sequence, and "
            "all counts of a step together, may have at most 2**31 - 1 tokens; give fewer"
        )
    if code == steps.TWICE:
        raise InvalidRequest(f"plan names address space {asids[where]} twice; add its counts up")
    raise StaleHandle(f"plan names address space {asids[where]}, which is not open; open or fork one")


def refuse_ids(s: State, plan: Plan, given: int, accepted: I64) -> NoReturn:
    """Raise the error of a commit of `given` token ids for a plan of which `accepted[i]` tokens are to be kept."""
    if not plan.is_outstanding:
        refuse_settling(s, plan, steps.SETTLED, 0)
    raise InvalidRequest(
        f"commit got {given} token ids and counts {accepted.tolist()[:8]} for a plan of {len(plan.rows)} spaces; "
        "give one count for each space, and as many ids as they add up to"
    )


def refuse_settling(s: State, plan: Plan, code: int, where: int) -> NoReturn:
    """Raise the error of a plan that could not be committed or aborted."""
    if code == steps.SETTLED:
        raise PlanConflict(f"this plan was {plan.settled} already; make a new one")
    asid = plan.rows[where]
    if code == steps.OUT_OF_ORDER:
        raise PlanConflict(
            f"cannot commit this plan: it starts at token {plan.starts[where]} of address space {asid}, "
            f"which has only {s.spaces['length'][asid]} committed tokens; commit the older plans first"
        )
    if code == steps.TOO_MANY:
        raise InvalidRequest(
            f"commit keeps more tokens of address space {asid} than the {plan.remaining[where]} planned, or fewer than "
            f"0; give a count from 0 to {plan.remaining[where]}"
        )
    raise PlanConflict(
        f"cannot give back planned tokens of address space {asid}: a newer plan follows them; abort the newer one first"
    )
