"""Pictures as SVG text: the same ones serve the dashboard, the offline report and print. Free of torch.

No picture carries a style attribute, a script or an outside reference, so that they show under a strict policy.
"""
