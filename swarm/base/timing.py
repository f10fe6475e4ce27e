"""A run's deadlines, and their presets. Owns the figures; must not know who waits."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Timing(BaseModel):
    """Deadlines in seconds. `local`, `lan` and `wan` are presets; each field may be overridden."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    heartbeat_s: float = Field(0.5, ge=0.01, description="a server that still works says so this often")
    connect_s: float = Field(2.0, ge=0.05, description="a connection must stand within this time")
    stall_s: float = Field(8.0, ge=0.05, description="a caller waits only while counters advance within this time")
    request_s: float = Field(4.0, ge=0.05, description="deadline of a short request that needs no compute")
    lease_s: float = Field(8.0, ge=0.05, description="a trainer silent for longer loses its tickets")
    coordinator_s: float = Field(3.0, ge=0.05, description="a coordinator silent for longer is replaced")
    record_ttl_s: float = Field(10.0, ge=0.1, le=3600, description="life of a DHT record at its receiver; renewed at a third")
    genesis_quiet_s: float = Field(1.0, ge=0, description="the run starts once nobody new has come for this long")
    stage_lost_s: float = Field(60.0, ge=0.05, description="a stage without a holder for this long is lost")
    average_s: float = Field(30.0, ge=0.05, description="an averaging round of which nothing moves for this long has failed")
    rebalance_every_s: float = Field(
        300.0, ge=0, description="time between decisions whether peers move to another stage; 0 moves nobody"
    )

    @model_validator(mode="after")
    def _cross_check(self) -> Timing:
        if self.stall_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"stall_s {self.stall_s:g} is below two heartbeats of {self.heartbeat_s:g} s (heartbeat_s): every wait would fail"
            )
        return self


TIMING_PRESETS: dict[str, dict[str, float]] = {
    "local": {},
    "lan": {
        "connect_s": 3.0,
        "stall_s": 20.0,
        "request_s": 6.0,
        "lease_s": 20.0,
        "coordinator_s": 5.0,
        "record_ttl_s": 20.0,
        "genesis_quiet_s": 3.0,
        "stage_lost_s": 120.0,
        "average_s": 120.0,
    },
    "wan": {
        "heartbeat_s": 2.0,
        "connect_s": 10.0,
        "stall_s": 60.0,
        "request_s": 20.0,
        "lease_s": 60.0,
        "coordinator_s": 15.0,
        "record_ttl_s": 60.0,
        "genesis_quiet_s": 10.0,
        "stage_lost_s": 600.0,
        "average_s": 1200.0,
    },
}
