"""The reduced twin: the same architecture at small dims, every block kind and every odd flag kept."""

from onboarding.twin.models import build
from onboarding.twin.plan import TwinPlan
from onboarding.twin.search import derive

__all__ = ["TwinPlan", "build", "derive"]
