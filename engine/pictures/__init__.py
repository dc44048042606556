# SPDX-License-Identifier: Apache-2.0
"""Pictures of requests: fetched or taken from the URL, checked, decoded, and processed to items of
pixels."""
