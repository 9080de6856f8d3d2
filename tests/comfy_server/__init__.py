"""Support for the tests that drive a real ComfyUI server and its page (60 §13). Not imported by the pack."""
