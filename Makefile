.PHONY: dev check test docs

dev:            ## set up .venv with everything
	./test --collect-only -q

check:          ## static checks only
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports

test:           ## the default tests
	./test

docs:           ## regenerate the reference pages that are generated
	.venv/bin/python scripts/generate_docs.py
