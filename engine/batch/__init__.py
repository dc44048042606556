# SPDX-License-Identifier: Apache-2.0
"""What one step changes in the batch, as the worker and the sampler both see it."""
