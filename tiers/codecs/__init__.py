# SPDX-License-Identifier: Apache-2.0
"""Makes blocks smaller on their way to a tier and back; never imports torch, numpy or a tier."""
