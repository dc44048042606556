# SPDX-License-Identifier: Apache-2.0
"""What `stratakv doctor` looks at before an engine is started.

base.py      a finding, and how checks are run
probe.py     what runs in the other engine's Python, and knows nothing of ours
python.py    what it found: that Python, its packages, vLLM
host.py      this machine for an engine or a cache server of ours, and the list of its checks
machine.py   memory, shared memory, the clock
disk.py      where an SSD tier is to lie
servers.py   cache servers
vllm.py      what vLLM is to be given, and the list of checks for vLLM
"""
