"""The worker process: FastAPI on uvicorn, its routes and what stands around every request."""
