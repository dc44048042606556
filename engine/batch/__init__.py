# SPDX-License-Identifier: Apache-2.0
"""The changes of the batch in one step, for the worker and the sampler."""
