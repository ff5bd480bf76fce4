"""The call that Databricks notebooks know, on top of `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from hvd_core.errors import InvalidArgument
from hvd_core.launch import Env

from .runner import run


class HorovodRunner:
    """`HorovodRunner(np=2).run(main, lr=0.1)` calls `main(lr=0.1)` on two ranks and returns rank 0's result.

    np: ranks on the cluster, one for each slot they take; -N: N ranks on the driver's machine, without Spark;
    0: as many as the cluster has slots. local_mode=True: np ranks on the driver's machine, as -np.
    driver_log_verbosity: "all" shows here what ranks print, each line with its rank; "log_callback_only"
    shows only what they say with `hvd_core.log_to_driver(message)`. env: as for `hvd_spark.run`.
    """

    def __init__(
        self,
        *,
        np: int,
        driver_log_verbosity: Literal["all", "log_callback_only"] = "all",
        local_mode: bool = False,
        env: Env = None,
    ):
        if not isinstance(np, int) or isinstance(np, bool):
            raise InvalidArgument(f"np must be a whole number, not {np!r}")
        if driver_log_verbosity not in ("all", "log_callback_only"):
            raise InvalidArgument(
                f"driver_log_verbosity must be 'all' or 'log_callback_only', not {driver_log_verbosity!r}"
            )
        if local_mode and np == 0:
            raise InvalidArgument("local_mode needs np, the number of ranks on the driver's machine")
        self.num_processor = -abs(np) if local_mode else np
        self.driver_log_verbosity = driver_log_verbosity
        self.env = env

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Raises as `hvd_spark.run` does, for np < 0 as `hvd_core.run`."""
        np, printed = self.num_processor, self.driver_log_verbosity == "all"
        results = run(
            main, (), kwargs, num_proc=abs(np) or None, env=self.env, printed=printed, local_mode=np < 0
        )
        return results[0]
