"""Modules that match no family: what is seen of them, what is proposed for them, and its proof. See docs/agents.md."""
