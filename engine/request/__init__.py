# SPDX-License-Identifier: Apache-2.0
"""A request: prompt, sampling parameters, results and the messages that carry them."""
