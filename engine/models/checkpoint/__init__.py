# SPDX-License-Identifier: Apache-2.0
"""The files of a model, local or from the Hugging Face Hub: checks, JSON fields, weights."""
