"""The worker process: FastAPI on uvicorn, its routes, and the checks and records around every request."""
