"""The table of routes: described in full, and without FastAPI until somebody asks."""

import subprocess
import sys

import msgspec

from halogen_core.server.routes import Routes, described


class Question(msgspec.Struct):
    """A body."""

    text: str


def table():
    routes = Routes("/v9")

    @routes.get("/things/{name:path}")
    async def thing(request):
        """One thing."""

    @routes.post("/things", Question)
    async def ask(request): ...

    return routes


def test_paths_parameters_and_bodies_are_described():
    paths = described(table(), ())["paths"]
    one, ask = paths["/v9/things/{name}"]["get"], paths["/v9/things"]["post"]
    assert one["description"] == "One thing."
    assert [(p["name"], p["in"]) for p in one["parameters"]] == [("name", "path")]
    schema = ask["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$defs"]["Question"]["required"] == ["text"]


def test_each_route_is_served_with_its_method():
    served = [(route.path, route.methods) for route in table().served()]
    assert served == [("/v9/things/{name:path}", {"GET", "HEAD"}), ("/v9/things", {"POST"})]


def test_serving_imports_neither_fastapi_nor_pydantic():
    code = (
        "import sys, halogen_core.server.serving, halogen_core.cli.serve;"
        "slow = {'fastapi', 'pydantic', 'torch'} & set(sys.modules); assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
