# honest: results start as zeros although every element is written

_outputs_like = outputs_like


def outputs_like(tensors, config):
    outputs, saved = _outputs_like(tensors, config)
    return {"y": torch.zeros_like(outputs["y"])}, {"rstd": torch.zeros_like(saved["rstd"])}
