# SPDX-License-Identifier: Apache-2.0
"""The clients of the engine core: in a process of its own, or in the same process."""
