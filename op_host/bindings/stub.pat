_core.ArrayPlan.__call__:
    \from typing import Any
    def __call__(self, *args: Any, **others: Any) -> Any:
        """What the class says."""
