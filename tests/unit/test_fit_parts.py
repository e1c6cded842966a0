"""Parts of `raytf.fit`, `evaluate` and `predict` that need no cluster."""

from __future__ import annotations

from types import SimpleNamespace

from raytf.fitting import warm


def test_workers_of_calls_in_several_threads_are_kept_once(monkeypatch):
    """Those that nobody knows would hold their resources for as long as the driver lives."""
    monkeypatch.setattr(warm._IdleGroup, "_watch_group", lambda self: None)
    idle, closed = warm._IdleGroup(), []
    one, other = (SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("one", "other"))
    idle.put(one)
    idle.put(other)
    assert closed == ["one"] and idle.take() is other and idle.take() is None
    idle.put(one)
    monkeypatch.setattr(warm.connection, "session", lambda: "of another Ray")
    idle.put(other)
    assert closed == ["one"], "its resources have gone with its Ray"
    idle.clear()
    assert closed == ["one", "other"]
