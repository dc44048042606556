# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: their files, their matrices, and their slots in a model."""
