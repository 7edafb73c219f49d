import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Sends a body, as the client does by default (which asks for HTTP/2), whole and as a stream of lines. */
public class Ask {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int n = 0; n < arguments.length; n += 2) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[n]))
                .POST(HttpRequest.BodyPublishers.ofString(arguments[n + 1])).build();
            var answer = client.send(request, HttpResponse.BodyHandlers.ofLines());
            System.out.println(answer.version() + " " + answer.statusCode());
            answer.body().forEach(System.out::println);
        }
    }
}
