"""The doors that others knock on: files of requests and, later, gRPC."""
