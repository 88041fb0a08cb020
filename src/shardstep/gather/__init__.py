"""All-gather of updated parameters, at once or overlapped with the next forward."""
