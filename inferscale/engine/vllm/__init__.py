"""KV → STOCK vLLM: a connector that vLLM loads, and an engine that talks to it. See docs/design/vllm.md.

`connector` runs inside vLLM's processes, `plans` is where those meet the process that plans requests.
"""
