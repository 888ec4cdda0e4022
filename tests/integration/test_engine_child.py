"""The engine's process before it has been told anything."""

from halogen_core.engine.child import Child


def test_a_child_ends_when_its_parent_lets_go():
    child = Child.spawn()
    child.connection.close()
    assert child.process.wait(timeout=60) == 1


def test_a_child_that_is_not_needed_is_ended():
    child = Child.spawn()
    child.end()
    assert child.process.returncode == -9
    child.end()
