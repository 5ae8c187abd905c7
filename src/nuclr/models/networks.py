"""Image models of nuclr's own. Importing this module registers them with transformers: AutoModel then loads them.

`GroupNormResNet` is a ResNet with group norm instead of batch norm. A sample's features do not depend on the other
samples of its batch, so two processes compute what one would, up to rounding.

`Edges` gives colors and edges, averaged over a grid of cells; its few weights are known beforehand. With a trained head
it learns in seconds what small drawings show, where a network that starts from random weights needs minutes.
Photographs need a real network.
"""

import math

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, ResNetConfig, ResNetModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

NOISE = 0.1  # steps in brightness below this are texture, not edges
GAIN = 8.0  # makes edges as large as colors


class GroupNormResNetConfig(ResNetConfig):
    """ResNetConfig with the number of `groups`, which must divide all widths."""

    model_type = "nuclr_group_norm_resnet"
    groups: int = 8


class GroupNormResNet(ResNetModel):
    """The ResNet of transformers with every batch norm replaced by a group norm."""

    config_class = GroupNormResNetConfig

    def __init__(self, config: GroupNormResNetConfig) -> None:
        super().__init__(config)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(config.groups, child.num_features))


class EdgesConfig(PreTrainedConfig):
    """Number of `cells` per side of the image, and of `directions` of edges."""

    model_type = "nuclr_edges"
    cells: int = 8
    directions: int = 8


class Edges(PreTrainedModel):
    """Map pixels (b, 3, h, w) to colors and edges by direction, (b, (3 + directions) cells^2).

    An edge is a step in brightness, found by Sobel's filter turned into each direction. The filters are the only
    parameters.
    """

    config_class = EdgesConfig
    main_input_name = "pixel_values"

    def __init__(self, config: EdgesConfig) -> None:
        super().__init__(config)
        across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        angles = [2 * math.pi * k / config.directions for k in range(config.directions)]
        turned = [math.cos(angle) * across + math.sin(angle) * across.T for angle in angles]
        self.filters = nn.Parameter(torch.stack(turned)[:, None])
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the filters are not random."""

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Return the cells as `last_hidden_state` (b, 3 + directions, cells, cells) and, flat, as `pooler_output`."""
        brightness = pixel_values.mean(1, keepdim=True)
        edges = GAIN * nn.functional.relu(nn.functional.conv2d(brightness, self.filters, padding=1) - NOISE)
        cells = nn.functional.adaptive_avg_pool2d(torch.cat([pixel_values, edges], 1), self.config.cells)
        return BaseModelOutputWithPooling(last_hidden_state=cells, pooler_output=cells.flatten(1))  # type: ignore[arg-type]


for config, model in ((GroupNormResNetConfig, GroupNormResNet), (EdgesConfig, Edges)):
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
