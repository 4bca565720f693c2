"""The bidirectional LSTM with which EmbracingFL, partial averaging and FedLAMA read film reviews."""

from __future__ import annotations

from torch import Tensor, nn

from model_export.zoo.width import channels


class Recurrence(nn.Module):
    """Dropout, a bidirectional LSTM, dropout: sequences in, the last states of both directions out.

    The dropouts are in here so that they belong to the part that trains: activations stored before this
    module are dropped anew in every step. Biases begin with 1 at the forget gates, so that the first steps remember
    (Jozefowicz et al. 2015), and with 0 elsewhere.
    """

    def __init__(self, inputs: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout_in = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=True)
        self.dropout_out = nn.Dropout(dropout)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):  # of the gates input, forget, cell and output
                nn.init.ones_(parameter.data[hidden : 2 * hidden])
            if name.startswith("bias_hh"):  # PyTorch adds two biases per gate; one is enough
                parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.dropout_in(x))
        return self.dropout_out(last.transpose(0, 1).flatten(1))


class ImdbBiLSTM(nn.Module):
    """One logit per review, shape [N, 1]: positive or negative.

    The narrow one reads the first values of every word and has the first units of both directions.
    """

    def __init__(self, vocabulary: int, units: int = 256, dropout: float = 0.3, width: float = 1.0) -> None:
        super().__init__()
        kept = channels(units, width)
        self.embedding = nn.Embedding(vocabulary, kept)
        nn.init.xavier_uniform_(self.embedding.weight)  # PyTorch's own have a deviation of 1: words would shout
        self.recurrence = Recurrence(kept, kept, dropout)
        self.classifier = nn.Linear(2 * kept, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.recurrence(self.embedding(tokens)))
