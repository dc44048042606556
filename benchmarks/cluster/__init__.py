# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench cluster`: measures prompts that one node computes and another node answers."""
