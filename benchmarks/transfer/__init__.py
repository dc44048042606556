# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench transfer`: copies between pool and slab held against plain memory."""
