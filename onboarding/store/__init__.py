"""The store: every read and write of the database goes through here.

Writing transactions lock the job's row first, so that transitions of one job are serial and event numbers have no
gaps; state changes are single ``UPDATE ... WHERE`` statements whose row count is checked. Reading a row into an object,
changing it and writing it back is banned: it lost updates under four writers on SQLite and on PostgreSQL.
"""

from onboarding.store.access import AccessStore, IdempotencyState
from onboarding.store.base import NewEvent
from onboarding.store.events import EventStore
from onboarding.store.jobs import JobPage
from onboarding.store.ledger import BudgetLimits, Call, LedgerStore, Purse, Turn
from onboarding.store.logs import log_path
from onboarding.store.steps import Beat, StepStore

__all__ = [
    "Beat",
    "BudgetLimits",
    "Call",
    "IdempotencyState",
    "JobPage",
    "NewEvent",
    "Purse",
    "Store",
    "Turn",
    "log_path",
]


class Store(StepStore, EventStore, AccessStore, LedgerStore):
    """All of the store.

    Args:
        url: SQLAlchemy URL, ``sqlite:///path`` or ``postgresql://...``.
    """
