# SPDX-License-Identifier: Apache-2.0
"""Words on the wire: `.proto` files and the code generated from them; imports nothing of ours."""
