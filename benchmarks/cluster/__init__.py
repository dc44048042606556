# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench cluster`: prompts computed on one node and answered by another."""
